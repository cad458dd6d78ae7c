"""`python -m trainstep`: the same as the console script `trainstep`."""

from trainstep.cli.app import main

if __name__ == "__main__":
    main()
