"""Talk with a model: the conversation, and the terminal it is held in."""
