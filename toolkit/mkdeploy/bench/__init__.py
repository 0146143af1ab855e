"""`mkdeploy bench`: what to measure, measuring it under a memory cap, and the records."""
