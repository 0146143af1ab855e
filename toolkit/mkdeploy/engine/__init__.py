"""The engine as a separate process: options and transport, its events, what it tells about itself."""
