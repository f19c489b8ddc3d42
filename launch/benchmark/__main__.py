import sys

from launch.benchmark import main

sys.exit(main())
