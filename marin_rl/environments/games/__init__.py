"""Rules of the games that the environment `game` plays: plain Python, one module per game."""
