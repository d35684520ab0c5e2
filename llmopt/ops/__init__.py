"""The Python face of the native ops: for each family a torch reference and the choice between the two."""
