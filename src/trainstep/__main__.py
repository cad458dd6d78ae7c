"""`python -m trainstep`: the same as the console script `trainstep`."""

import sys

if __name__ == "__main__":
    try:
        from trainstep.cli.app import main
    except KeyboardInterrupt:  # main itself meets what comes later
        sys.exit(130)
    main()
