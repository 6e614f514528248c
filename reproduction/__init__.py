"""Write the measured tables of REPRODUCTION.md, and learning curves, from the committed runs."""
