"""Problems and their scoring: `base` is the protocol, `checks` makes and checks environments."""
