"""`python -m paceline` is the `paceline` command."""

from paceline.cli.app import main

if __name__ == "__main__":
    main()
