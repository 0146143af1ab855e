"""The package format: its manifest, opening and verifying one, looking into one."""
