"""The commands of the command line, one module each; `vision.cli.COMMANDS` names them."""
