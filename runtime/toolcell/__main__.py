"""`python -m toolcell`: the same as the command `toolcell`."""

from toolcell.cli import main

if __name__ == "__main__":
    main()
