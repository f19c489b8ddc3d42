import sys

from launch.quickstart.job import main

sys.exit(main())
