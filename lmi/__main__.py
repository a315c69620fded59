"""`python -m lmi` is the command `lmi`."""

from lmi.cli import main

main()
