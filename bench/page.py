from pathlib import Path
def write(f): pass
def newest(): return Path()
