"""What a fitted model is asked: distributions given rows, effects, counterfactuals, forecasts, identification."""
