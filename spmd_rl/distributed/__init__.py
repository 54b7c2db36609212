"""Who is where, how rank 0 speaks to all, and how samples travel from rank to rank."""
