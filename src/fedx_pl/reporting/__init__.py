"""What people look at: TensorBoard, the terminal and the run folder's tables."""
