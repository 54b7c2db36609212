"""Other people's bugs: one record each, with the reason, the versions, and when it may go."""
