"""The machines: one frozen record each, so that nothing else in the program asks where it runs."""
