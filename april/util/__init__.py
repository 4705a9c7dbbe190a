"""What every room rests on: clock, files, logs, processes, and the registry of parts."""
