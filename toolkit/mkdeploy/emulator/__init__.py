"""An emulated phone: adb's daemon on loopback, and the small Android world that its commands run in."""
