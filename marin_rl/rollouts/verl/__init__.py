"""Our environments under verl's trainer: data, reward, agent loop and configuration in a folder."""
