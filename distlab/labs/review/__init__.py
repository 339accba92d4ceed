"""Review a change: approve it, or name the line and the axis of its defect."""
