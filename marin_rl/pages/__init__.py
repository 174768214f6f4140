"""Pages of a run for a browser: one self-contained file, or served while the run is in progress."""
