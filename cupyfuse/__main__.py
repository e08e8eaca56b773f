"""Entry point of `python -m cupyfuse`."""

import sys

if __name__ == "__main__":
    try:
        from .cli import main

        status = main()
    except KeyboardInterrupt:  # while the commands were being imported
        status = 130
    sys.exit(status)
