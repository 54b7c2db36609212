"""Check what we rely on in the wheels that NPUs run on, in those wheels: without a device, CANN or torch."""
