"""What tuning found, per machine, and how it is shared. To come: no profile is read or written yet."""
