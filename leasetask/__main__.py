"""`python -m leasetask` is the `leasetask` command."""

from leasetask.cli import main

main()
