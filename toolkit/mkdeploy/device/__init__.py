"""The phone, seen from the host: adb's protocol, files, processes, and what is known of the hardware."""
