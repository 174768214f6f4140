"""Problems and their scoring: one file per environment; `base` has the protocol and registry."""
