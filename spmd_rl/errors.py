"""Say what a user can change."""


class ConfigError(ValueError):
    """A user's settings cannot be used; the message holds every problem, one a line."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
