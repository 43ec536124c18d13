"""The state between runs: commits, files on any file system, waivers, upkeep."""
