"""Output in the terminal: tables of results, and live progress of a run. No file is written."""
