"""`python -m portadraft`."""

from portadraft.cli.app import main

if __name__ == "__main__":
    main()
