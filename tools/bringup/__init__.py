"""Find out on a device what could not be found out without one: docs/npu_bringup.md."""
