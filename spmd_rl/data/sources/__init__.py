"""Read prompts: from files, directories, the hub, tasks made here."""
