"""`lmi bench`: a load test for servers of five wire dialects."""
