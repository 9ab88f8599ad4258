"""`python -m fedskew` is the `fedskew` command."""

from fedskew.cli.main import main

if __name__ == "__main__":
    main()
