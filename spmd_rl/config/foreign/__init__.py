"""Names that other programs have for settings, and what they are here."""
