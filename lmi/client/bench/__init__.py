"""`lmi bench`: a load test for servers of four wire dialects."""
