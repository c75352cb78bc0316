"""`python -m charonia`: the same as the command `charonia`."""

import sys

from charonia.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
