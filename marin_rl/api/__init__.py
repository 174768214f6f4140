"""The Python surface: what `from marin_rl import …` gives to scripts and notebooks.

`training.py` starts a run and follows it round by round, or learns from examples or pairs;
`sampling.py` samples text from a model folder or a checkpoint. Configurations are
`marin_rl.config`'s, tables `marin_rl.analysis`'.
"""
