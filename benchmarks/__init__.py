"""Speed measurements; README.md in this directory says what each command measures."""
