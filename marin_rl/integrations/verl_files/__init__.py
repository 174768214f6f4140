"""Files that are copied for verl: they import verl and the standard library alone."""
