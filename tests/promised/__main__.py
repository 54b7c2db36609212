from promised import HERE, all_settings

(HERE / "settings.txt").write_text("\n".join(all_settings()) + "\n")
