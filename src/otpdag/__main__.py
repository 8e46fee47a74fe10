"""``python -m otpdag`` is the command line ``otpdag``."""

from otpdag.cli import main

if __name__ == "__main__":
    main()
