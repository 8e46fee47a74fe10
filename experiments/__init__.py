"""One module for each table or figure; ``otpdag reproduce`` lists and runs them."""
