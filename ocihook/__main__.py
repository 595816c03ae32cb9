"""`python -m ocihook` is the `ocihook` command."""

from ocihook.cli.main import main

main()
