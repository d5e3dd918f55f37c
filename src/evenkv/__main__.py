"""`python -m evenkv` is the same as the `evenkv` script."""

from evenkv.cli.main import main

if __name__ == "__main__":
    main()
