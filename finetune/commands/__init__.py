"""The words of the command line, one file a word. Each has HELP, TAKES and main(arguments) -> exit code."""
