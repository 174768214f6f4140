"""The tables of a run as Parquet, its checkpoints, and the conversion between nouns and rows."""
