"""What the machine is and how busy it is: processor, memory, GPUs, drivers, other processes."""
