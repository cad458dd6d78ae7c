"""`python -m trainstep`: the same as the console script `trainstep`.

Modules that Python imports before it reads this file (trainstep itself, `types`, `functools`) may still come from the current
folder; `python -P -m trainstep` and the console script never search it.
"""

import sys

if __name__ == "__main__":
    try:
        from trainstep.config.import_path import leave_current_folder

        leave_current_folder()  # before anything else is imported

        from trainstep.cli.app import main
    except KeyboardInterrupt:  # a later Ctrl-C is handled inside main
        print("\ntrainstep: interrupted", file=sys.stderr)
        sys.exit(130)
    main()
